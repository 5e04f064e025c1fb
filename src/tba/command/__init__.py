"""The commands of the command line, one file each. They stand above the runtimes."""
