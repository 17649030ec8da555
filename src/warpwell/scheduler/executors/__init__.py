"""What runs tasks: a GPU, or the threads of a CPU."""
