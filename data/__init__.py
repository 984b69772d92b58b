"""A package: without this file any other `data` on the path would take its place."""
