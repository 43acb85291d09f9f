-- Returns one right that this user lacks, if there is one. A right to some columns counts: its statement then names the others.
--
-- → table, right
SELECT t.name, r.name
FROM (VALUES ('{locks}'), ('{waiters}')) AS t(name)
CROSS JOIN (VALUES ('SELECT'), ('INSERT'), ('UPDATE'), ('DELETE')) AS r(name)
WHERE NOT (has_table_privilege(t.name, r.name) OR (r.name <> 'DELETE' AND has_any_column_privilege(t.name, nullif(r.name, 'DELETE'))))
LIMIT 1
