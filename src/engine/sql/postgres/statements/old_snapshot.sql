-- Returns what keeps old versions of rows of the locks, if there are many of them. Each statement reads all versions of its rows.
--
-- → the oldest snapshot
SELECT o.what
FROM (VALUES ('{locks}'::regclass)) AS t(id)
CROSS JOIN (
  SELECT 'the process ' || pid AS what, age(backend_xmin) AS age FROM pg_stat_activity
  WHERE pid <> pg_backend_pid() AND (datname = current_database() OR backend_type = 'walsender')
  UNION ALL SELECT 'the replication slot ' || slot_name, age(xmin) FROM pg_replication_slots
  UNION ALL SELECT 'the prepared transaction ' || gid, age(transaction) FROM pg_prepared_xacts WHERE database = current_database()
) AS o
WHERE o.age > 1000 AND pg_stat_get_dead_tuples(t.id) > 10 * (1000 + pg_stat_get_live_tuples(t.id))
ORDER BY o.age DESC
LIMIT 1
