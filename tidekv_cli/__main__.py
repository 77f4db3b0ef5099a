"""`python -m tidekv_cli`."""

from tidekv_cli.cli import entry_point

if __name__ == "__main__":
    entry_point()
