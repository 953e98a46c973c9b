"""Places that training runs in: each turns its surroundings into one configuration."""
