"""``python -m trainer``; the guard matters: the checkpoint daemon is spawned and re-imports this module."""

from trainer.cli import main

if __name__ == "__main__":
    main()
