-- Makes one attempt as acquire.sql does, and reads the lease as it was before. Without arrays it is executed faster.
--
-- $1 name   $2 owner   $3 ttl in ms   $4 host   $5 pid   $6 metadata
-- → fence (NULL: not granted), owner of the earlier lease (NULL: none), remaining time of that lease
--
-- {lock_timeout}: behind a pooler, the limit of the wait for a locked row.
WITH granted AS (
  INSERT INTO {locks} AS l (name, owner, fence, expires_at, since, host, pid, metadata)
    SELECT $1::bytea, $2::text, (date_part('epoch', clock.now) * 1e6)::bigint,
      clock.now + $3::bigint * interval '1 millisecond', clock.now, $4::text, $5::bigint, $6::text
    FROM (SELECT clock_timestamp() AS now{lock_timeout} OFFSET 0) AS clock
    WHERE NOT EXISTS (SELECT FROM {locks} AS s
      WHERE s.name = $1::bytea AND (s.queued > 0 OR (s.expires_at > clock.now AND s.owner IS DISTINCT FROM $2::text)))
  {grant}
  RETURNING l.fence
)
SELECT (SELECT fence FROM granted), h.owner, (date_part('epoch', h.expires_at - clock_timestamp()) * 1e6)::bigint
FROM (SELECT) AS one
LEFT JOIN {locks} AS h ON h.name = $1::bytea AND h.owner IS NOT NULL AND h.expires_at > clock_timestamp()
