-- Releases a name of any owner, or all shares of a name. One that is only reserved for a waiter stays reserved.
--
-- $1 name   $2 the first row   $3 the name after the last one
-- → port, number of its first live waiter
-- → one row for each lease that there was: whether it had not expired
SELECT wake_port, wake_id
FROM "{table}_waiters"
WHERE name = $1 AND alive_until > CAST(round(unixepoch('subsec') * 1000) AS INTEGER)
ORDER BY ticket
LIMIT 1;
DELETE FROM "{table}" WHERE name >= $2 AND name < $3 AND owner NOT LIKE '%-next'
RETURNING expires_at > CAST(round(unixepoch('subsec') * 1000) AS INTEGER);
