"""The nodes as they report: records, names, pools."""
