"""A process of a launch: its experiment has one more callback, by which it collects, or learns, for the others (`amago.launch`)."""
