-- Reads the shares of names, after the expired ones were removed: what is left holds.
--
-- $1 first stored names   $2 the names after the last ones
-- → name, owner, end of the lease, fence, permits, their limit
SELECT l.name, l.owner, (date_part('epoch', l.expires_at) * 1e6)::bigint, l.fence, l.permits, l.permit_limit
FROM unnest($1::bytea[], $2::bytea[]) AS c(first, last)
CROSS JOIN LATERAL (SELECT * FROM {locks} WHERE name >= c.first AND name < c.last OFFSET 0) AS l
