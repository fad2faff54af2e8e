"""What is asked: spec files read, validated and expanded into cases.

May import floor 0, ruamel.yaml and pydantic; never onnx or numpy.
"""
