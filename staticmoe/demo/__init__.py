"""What `staticmoe train` trains: a reference language model, its text, its yardstick and its checkpoints."""
