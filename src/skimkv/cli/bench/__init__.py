"""`skimkv bench`: one module for each command, and what the commands share in `common` and `table`."""
