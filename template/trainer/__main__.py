"""``python -m trainer``; the guard matters: the checkpoint daemon is spawned and re-imports this module."""

import logging

from trainer.cli import main

if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    logging.disable(logging.INFO)  # torch tells of every save in the checkpoint daemon
