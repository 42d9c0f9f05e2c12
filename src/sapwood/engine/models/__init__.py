"""What a model of transformers becomes here: its groups, its memory, its layers."""
