-- Takes a place in the queue of a name, or keeps it alive, or moves it there from another name with its ticket.
--
-- $1 owner   $2 name   $3 now   $4 the place's end   $5 port and $6 number to wake it by
-- $7 places that lapsed before this are forgotten
-- → port, number of the next waiter of the name that the place moves away from, if that name is free
SELECT next.wake_port, next.wake_id
FROM "{table}_waiters" AS place
JOIN "{table}_waiters" AS next ON next.ticket =
  (SELECT ticket FROM "{table}_waiters"
    WHERE name = place.name AND owner <> $1 AND alive_until > $3 ORDER BY ticket LIMIT 1)
WHERE place.owner = $1
  AND place.name <> $2
  AND next.wake_id IS NOT NULL
  AND NOT EXISTS (SELECT 1 FROM "{table}" AS held WHERE held.name = place.name AND held.expires_at > $3);
INSERT INTO "{table}_waiters" (owner, name, alive_until, wake_port, wake_id) VALUES ($1, $2, $4, $5, $6)
  ON CONFLICT (owner) DO UPDATE SET
    name = excluded.name, alive_until = excluded.alive_until,
    wake_port = excluded.wake_port, wake_id = excluded.wake_id;
DELETE FROM "{table}_waiters" WHERE ticket IN
  (SELECT ticket FROM "{table}_waiters" WHERE alive_until < $7 ORDER BY alive_until LIMIT 16);
