"""Optional places results are sent to; each loads its library only when it is configured."""
