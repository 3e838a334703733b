"""Where is the cut, what is the signal? Found by tracing one forward; what tracing cannot know is declared."""
