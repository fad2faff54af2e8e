"""What is asked: spec files read, validated and expanded into cases."""
