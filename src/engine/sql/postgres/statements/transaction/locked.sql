-- Returns the names whose rows another transaction has locked. It waits for no lock.
--
-- $1 names
SELECT name FROM {locks} WHERE name = ANY($1::bytea[])
EXCEPT
SELECT name FROM (SELECT name FROM {locks} WHERE name = ANY($1::bytea[]) FOR NO KEY UPDATE SKIP LOCKED) AS free
