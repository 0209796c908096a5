-- A tenant's counters are gone although they belong to this epoch: everything is rebuilt.
-- KEYS: the registry. ARGV: now_us, epoch

if redis.call('HGET', KEYS[1], 'epoch') == ARGV[2] then
  redis.call('HDEL', KEYS[1], 'epoch')
end
return {'lost'}
