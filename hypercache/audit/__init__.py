"""What logs of requests say about a cache: readers of public traces, and their replay."""
