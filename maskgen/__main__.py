"""``python -m maskgen``: the mask compiler's command line."""

from maskgen.cli import main

if __name__ == "__main__":
    main(prog_name="python -m maskgen")
