"""How kept entries are held: one file and one class a store. A store answers the queries of later tokens."""
