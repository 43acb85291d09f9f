-- Claims the next sweep, if it is due. A row that says otherwise for longer than two intervals was written before the clock was
-- set back.
--
-- $1 name of the row   $2 interval in milliseconds
-- → one row: it is claimed
INSERT INTO {locks} AS l (name, fence, expires_at, since)
VALUES ($1::bytea, 0, clock_timestamp() + $2::bigint * interval '1 millisecond', clock_timestamp())
ON CONFLICT (name) DO UPDATE SET expires_at = excluded.expires_at
WHERE l.expires_at <= clock_timestamp() OR l.expires_at > excluded.expires_at + $2::bigint * interval '1 millisecond'
RETURNING 1
