"""The command line: one small file a verb. Nothing heavy is imported before a command needs it."""
