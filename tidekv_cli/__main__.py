"""`python -m tidekv_cli`."""

from tidekv_cli.entry import main

if __name__ == "__main__":
    main()
