"""The table of fault classes; see fill_docs.py."""

from result_tables import result, table


def classes() -> str:
    rows = [
        (each["name"], f"{each['cases']:,}", str(each["lost"]), f"`{each['command']}`")
        for each in result("reliability/faults.json")["classes"]
    ]
    return table(("faults", "cases", "lost", "command"), rows)
