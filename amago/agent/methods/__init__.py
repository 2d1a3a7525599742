"""Methods beyond the core of the loss, one a file: each is chosen by an option of the agents."""
