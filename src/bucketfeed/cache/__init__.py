"""From bytes to this node's disk: extents in files, shared by all processes, within a limit."""
