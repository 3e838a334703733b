"""One file a family: the TeaCache signal and the few facts a trace cannot show. Each declares `FAMILIES`."""
