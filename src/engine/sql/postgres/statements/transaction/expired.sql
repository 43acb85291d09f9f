-- Removes expired shares of names whose rows are locked. Waits for a renewal that is not committed yet, and then keeps that share: a
-- transaction that only left out expired ones would count it as free.
--
-- $1 first stored names   $2 the names after the last ones
--
-- The names are read first: with a join the server would read all rows.
DELETE FROM {locks} AS l
WHERE l.expires_at <= clock_timestamp() AND l.name = ANY (ARRAY(
  SELECT s.name
  FROM unnest($1::bytea[], $2::bytea[]) AS c(first, last)
  CROSS JOIN LATERAL (SELECT name FROM {locks}
    WHERE name >= c.first AND name < c.last AND expires_at <= clock_timestamp() OFFSET 0) AS s))
