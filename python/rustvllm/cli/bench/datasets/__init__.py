"""What a measurement sends: prompts with foreseeable answers, conversations from a file, and how long they are."""
