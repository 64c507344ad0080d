"""Other engines in this process, to be compared with; nothing that serves imports them."""
