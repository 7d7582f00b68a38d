"""`python -m healthd`."""

from healthd.cli import main

if __name__ == "__main__":
    main()
