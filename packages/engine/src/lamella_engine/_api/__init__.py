"""`fully_shard`, `FSDPModule` and the other calls of a user."""
