"""What a person starts: `bucketfeed launch`, and the training that every place starts."""
