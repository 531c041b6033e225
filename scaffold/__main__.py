from scaffold.cli import main

main(prog_name="scaffold")
