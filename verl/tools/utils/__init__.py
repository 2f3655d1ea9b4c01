"""What reads the files of tools."""
