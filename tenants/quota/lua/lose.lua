-- Ends the epoch, as a tenant's counters of it are gone: everything is rebuilt.
-- KEYS: the registry. ARGV: now_us, epoch

if redis.call('HGET', KEYS[1], 'epoch') == ARGV[2] then
  redis.call('HDEL', KEYS[1], 'epoch')
end
return {'lost'}
