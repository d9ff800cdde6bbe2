"""Sources that can be packed: folders, arrays, streams and the formats of other tools."""
