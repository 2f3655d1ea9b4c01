"""Training data and the batch type: files, chat templates, datasets, a resumable loader."""
