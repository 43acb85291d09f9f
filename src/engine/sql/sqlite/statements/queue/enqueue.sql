-- Enters the queue of a name, keeps the position there alive, or moves it there from another name with its ticket. Reserves the
-- names before that one, and removes the other reservations of the claim.
--
-- $1 owner   $2 name   $3 now   $4 the end of the position's liveness   $5 port   $6 number of the waiter
-- $7 positions that expired before this are removed
-- $10 permits   $11 their limit
-- $8 the names before, $9 all names of a claim of several names: JSON arrays of hexadecimal texts
-- → port, number of the next waiter of the name that the position moves away from, if that name is free
SELECT next.wake_port, next.wake_id
FROM "{table}_waiters" AS position
JOIN "{table}_waiters" AS next ON next.ticket =
  (SELECT ticket FROM "{table}_waiters"
    WHERE name = position.name AND owner <> $1 AND alive_until > $3 ORDER BY ticket LIMIT 1)
WHERE position.owner = $1
  AND position.name <> $2
  AND next.wake_id IS NOT NULL
  AND NOT EXISTS (SELECT 1 FROM "{table}" AS held WHERE held.name = position.name AND held.expires_at > $3);
INSERT INTO "{table}_waiters" (owner, name, alive_until, wake_port, wake_id, permits, permit_limit)
  VALUES ($1, $2, $4, $5, $6, $10, $11)
  ON CONFLICT (owner) DO UPDATE SET
    name = excluded.name, alive_until = excluded.alive_until,
    wake_port = excluded.wake_port, wake_id = excluded.wake_id;
DELETE FROM "{table}_waiters" WHERE ticket IN
  (SELECT ticket FROM "{table}_waiters" WHERE alive_until < $7 ORDER BY alive_until LIMIT 16);
INSERT INTO "{table}" (name, owner, fence, expires_at, since, host, pid)
  SELECT unhex(claimed.value), $1 || '-next', 0, $4, 0, '', 0 FROM json_each($8) AS claimed WHERE true
  ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, expires_at = excluded.expires_at, metadata = NULL;
DELETE FROM "{table}"
WHERE owner = $1 || '-next'
  AND name IN (SELECT unhex(claimed.value) FROM json_each($9) AS claimed)
  AND name NOT IN (SELECT unhex(claimed.value) FROM json_each($8) AS claimed);
