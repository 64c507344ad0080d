"""The flags of the server and the settings that they become. Light: ``--help`` imports it."""
