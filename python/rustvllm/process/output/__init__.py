"""Output of a serving process, which never waits for a reader and never fails without one."""
