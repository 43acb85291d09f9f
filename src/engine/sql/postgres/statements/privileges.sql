-- Returns one privilege that this user lacks, if there is one. A privilege on some columns counts as present: a statement that needs
-- another column fails with an error that names it.
--
-- → table, privilege
SELECT t.name, p.name
FROM (VALUES ('{locks}'), ('{waiters}')) AS t(name)
CROSS JOIN (VALUES ('SELECT'), ('INSERT'), ('UPDATE'), ('DELETE')) AS p(name)
WHERE NOT (has_table_privilege(t.name, p.name) OR (p.name <> 'DELETE' AND has_any_column_privilege(t.name, nullif(p.name, 'DELETE'))))
LIMIT 1
