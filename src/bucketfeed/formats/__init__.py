"""How objects hold samples: formats, the index of where each sample is, and decoders."""
