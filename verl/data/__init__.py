"""Data as people have it, and the batch that travels: files, chat templating, datasets, the resumable loader."""
