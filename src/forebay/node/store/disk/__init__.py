"""A volume on a disk: data files, the index, the journal, and what both readers and the writer know of them."""
