"""The start and the end of a server: which processes there are, who watches them, what the terminal shows."""
