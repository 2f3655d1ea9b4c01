"""Data as people have it, and the batch that travels: files, chat templates, datasets, a resumable loader."""
