-- Removes a limited number of expired rows, because other processes wait during the transaction.
--
-- $1 how long an expired position is kept
DELETE FROM "{table}" WHERE name IN
  (SELECT name FROM "{table}"
    WHERE expires_at <= CAST(round(unixepoch('subsec') * 1000) AS INTEGER) ORDER BY expires_at LIMIT 500);
DELETE FROM "{table}_waiters" WHERE ticket IN
  (SELECT ticket FROM "{table}_waiters"
    WHERE alive_until < CAST(round(unixepoch('subsec') * 1000) AS INTEGER) - $1 ORDER BY alive_until LIMIT 500);
