"""What the command line's verbs do, one file each. Above the runtimes: nothing imports this."""
