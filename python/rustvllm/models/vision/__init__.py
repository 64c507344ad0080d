"""Models that see images: a tower of transformers' in front of a text model of ours."""
